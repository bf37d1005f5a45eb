"""How ranks share the model: the mesh, DDP, FSDP2, and the stop vote in the loss."""
