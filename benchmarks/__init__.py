"""What gradient accumulation costs: time and memory, against the recipe."""
