"""The budget: how writers that know each other only by a store share its capacity.

docs/how_it_works/object_store.md describes the protocol.

    budget          one writer's account, a number in memory that the scheduler's thread asks
    claim           one claim, which says all in its name, and what the claims of a writer say
    claims          publishes, renews and compares claims
    namespace_cap   what a namespace may hold beside others
"""
