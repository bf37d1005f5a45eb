"""What samples the counters of one rank while it works, beside the training."""
