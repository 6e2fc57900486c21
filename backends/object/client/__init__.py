"""Rooms of client."""
