"""Recording and display of a run: metrics, console, TensorBoard, rollouts, plots and reports."""
