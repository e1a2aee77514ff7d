"""Linear and integer programs of other codes: HiGHS, OR-Tools, CBC, CP-SAT."""
