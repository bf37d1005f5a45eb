"""Sharing of the model among ranks: the mesh, DDP, FSDP2, and the stop vote in the loss."""
