"""Checkpoints: conversion of state to tensors and JSON (pack), files, manifest, folders, and the store over them."""
