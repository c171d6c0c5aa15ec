"""The Huginn family (tomg-group-umd/huginn-0125) for looped-spec."""
