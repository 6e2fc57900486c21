"""Rooms of manifests."""
