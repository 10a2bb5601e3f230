"""Rules that end rows early."""
