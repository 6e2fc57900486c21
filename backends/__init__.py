"""The tiers that come with kvtier, one folder each; installed as kvtier.backends."""
