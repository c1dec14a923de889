// An agent of Go's own net/http.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
)

type object map[string]any

func main() {
	tools := []object{{"type": "function", "function": object{"name": "look", "parameters": object{"type": "object"}}}}
	messages := []object{{"role": "user", "content": "Look at both."}}
	for turn := 1; turn <= 3; turn++ {
		body, _ := json.Marshal(object{"model": "gpt-5", "messages": messages, "tools": tools})
		ask, _ := http.NewRequest("POST", "https://api.openai.com/v1/chat/completions", bytes.NewReader(body))
		ask.Header.Set("Authorization", "Bearer "+os.Getenv("OPENAI_API_KEY"))
		ask.Header.Set("Content-Type", "application/json")
		answer, err := http.DefaultClient.Do(ask)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		said, _ := io.ReadAll(answer.Body)
		answer.Body.Close()
		fmt.Println(string(said))
		messages = append(messages, object{"role": "tool", "tool_call_id": fmt.Sprintf("call_done_%d", turn), "content": "there"})
	}
}
