"""Tiers and chains that tests hold in their hands: small slabs, regions, suites' subjects."""
