"""Linear and integer programming back ends: HiGHS, OR-Tools (HiGHS, SCIP, CBC), PuLP's CBC, CP-SAT."""
