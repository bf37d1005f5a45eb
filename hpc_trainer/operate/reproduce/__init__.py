"""Two runs of one configuration, compared by what they logged and by what they ran with."""
