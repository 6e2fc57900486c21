"""Rooms of interfaces."""
