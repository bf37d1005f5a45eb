"""Commands of the domain `verify`."""
