"""Rooms of housekeeping."""
