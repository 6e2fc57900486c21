"""Rooms of serving."""
