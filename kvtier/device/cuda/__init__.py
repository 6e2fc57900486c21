"""Rooms of cuda."""
