"""Changes to what torch and ExecuTorch do. Each module names the reason; without the reason, it can go."""
