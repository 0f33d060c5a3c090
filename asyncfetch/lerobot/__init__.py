"""LeRobot v3 datasets: metadata, tables by column and range, episodes and samples."""
