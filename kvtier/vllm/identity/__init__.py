"""Rooms of identity."""
