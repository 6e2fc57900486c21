"""Rooms of direct."""
