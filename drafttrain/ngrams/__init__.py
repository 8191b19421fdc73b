"""Self-Draft's n-gram caches: drafts that cost a look-up instead of a forward."""
