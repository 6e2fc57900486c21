"""Rooms of worker."""
