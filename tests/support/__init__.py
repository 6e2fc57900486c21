"""What several tests share: tiers, devices, the scheduler, stores, processes."""
