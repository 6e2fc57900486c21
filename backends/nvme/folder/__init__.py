"""Rooms of folder."""
