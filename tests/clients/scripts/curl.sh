# An agent of three curl commands; the second and third bring the results of the tool.
set -eu
tool='{"type":"function","function":{"name":"look","parameters":{"type":"object"}}}'
said='{"role":"user","content":"Look at both."}'
for turn in 1 2 3; do
  curl -sS https://api.openai.com/v1/chat/completions -H "Authorization: Bearer $OPENAI_API_KEY" \
    -H 'Content-Type: application/json' -d '{"model":"gpt-5","messages":['"$said"'],"tools":['"$tool"']}'
  said=$said',{"role":"tool","tool_call_id":"call_done_'$turn'","content":"there"}'
done
