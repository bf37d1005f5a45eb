"""What a run tells of itself: metrics, signs of life, speed, memory."""
