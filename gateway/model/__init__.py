"""The nouns: what is on the tape and what the API says. They see nothing else of ours. Begin with `rollout`, `span`."""
