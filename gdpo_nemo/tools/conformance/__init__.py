"""``gdpo-nemo conformance``: implementations of GDPO compared with recorded batches."""
