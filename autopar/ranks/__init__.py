"""Plans on real processes, one per rank, compared with the unpartitioned run."""
