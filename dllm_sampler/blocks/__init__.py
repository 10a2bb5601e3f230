"""Where blocks end."""
