"""Lower bounds on the optimum of a problem: messages, Lagrangian duals, linear programs, proofs that nothing fits."""
