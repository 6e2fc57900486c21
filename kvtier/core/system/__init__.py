"""Rooms of system."""
