"""Records and displays of a run: metrics, console, TensorBoard, rollouts, plots and reports."""
