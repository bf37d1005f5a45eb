"""`data=image_folder` and `image_shards`: a user's own pictures."""
