"""``gdpo-nemo chat``: a conversation with the policy of a run or with a model."""
