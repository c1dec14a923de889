"""The tape. `store` is the only package that opens LMDB; `retention` decides how long rollouts stay;
`background_answers` ends calls whose answers are fetched later; `hosted_sessions` makes
spans of what hosted agents do."""
