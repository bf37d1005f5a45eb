"""Reports of a run about itself: metrics, signs of life, speed."""
