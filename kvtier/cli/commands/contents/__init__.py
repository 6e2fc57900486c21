"""What a stack holds: looked at, proved, and removed."""
