"""Changes to what torch and ExecuTorch do. Each file names the reason; without the reason, the file can go."""
