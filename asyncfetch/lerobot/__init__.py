"""lerobot."""
