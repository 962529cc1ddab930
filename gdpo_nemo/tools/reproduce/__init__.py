"""``gdpo-nemo reproduce``: the experiments of the GDPO paper, and a page that compares the results with the paper's."""
