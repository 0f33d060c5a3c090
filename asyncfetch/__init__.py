"""asyncfetch."""
