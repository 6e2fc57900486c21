"""Rooms of traces."""
