"""Rooms of costs."""
