"""Rooms of records."""
