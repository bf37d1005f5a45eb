"""Files of a run folder that tell how a run goes and what it runs in. No torch."""
