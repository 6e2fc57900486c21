"""Rooms of hooks."""
