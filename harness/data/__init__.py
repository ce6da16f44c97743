"""Token datasets: downloaded from the Hub or built here, verified, and read as the microbatches of each rank."""
