package workspaces

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
)

// recordVersion is the version of records that this program writes. A record is
// a line with the version and a CRC-32C of the rest, then the rest: JSON.
const recordVersion = 1

// errSum reports bytes that are not those that were written.
var errSum = errors.New("checksum does not fit")

// A BrokenRecord is a workspace whose record cannot be read. It keeps its name
// until it is deleted by name.
type BrokenRecord struct {
	Name string
	Err  error
}

func sum(body []byte) uint32 { return crc32.Checksum(body, crc32.MakeTable(crc32.Castagnoli)) }

func encodeRecord(v any) ([]byte, error) {
	body, err := json.Marshal(v)
	if err != nil {
		return nil, fmt.Errorf("encode record: %w", err)
	}
	return append(fmt.Appendf(nil, "%d %08x\n", recordVersion, sum(body)), body...), nil
}

// decodeRecord fills v from what encodeRecord made. Errors: *VersionError for a
// newer record, otherwise the record is damaged.
func decodeRecord(data []byte, v any) error {
	head, body, _ := bytes.Cut(data, []byte("\n"))
	var version int
	var want uint32
	if n, _ := fmt.Sscanf(string(head), "%d", &version); n != 1 || version < 1 { // the count says it all
		return fmt.Errorf("record version in %.20q: not a number from 1", head)
	}
	if version > recordVersion { // its head may have another form
		return &VersionError{Version: version, Known: recordVersion}
	}
	if _, err := fmt.Sscanf(string(head), "%d %08x", &version, &want); err != nil {
		return fmt.Errorf("record head %.20q: %w", head, err)
	}
	if got := sum(body); got != want {
		return fmt.Errorf("%w: %08x, written as %08x", errSum, got, want)
	}
	if err := json.Unmarshal(body, v); err != nil {
		return fmt.Errorf("record body: %w", err)
	}
	return nil
}

// decodeWorkspace reads the record kept under name.
func decodeWorkspace(name string, data []byte) (*Workspace, error) {
	var w Workspace
	if err := decodeRecord(data, &w); err != nil {
		return nil, err
	}
	switch {
	case w.Name != name:
		return nil, fmt.Errorf("record is of %q", w.Name)
	case w.ID == "" || !w.Address.Is4() || !w.Backend.Is4() || len(w.Targets) == 0:
		return nil, errors.New("record lacks its identity, addresses or targets")
	}
	for _, t := range w.Targets {
		if t.ID == "" || !known(t.State) {
			return nil, fmt.Errorf("target %q: no identity or unknown state %q", t.Name, t.State)
		}
	}
	if _, ok := w.Target(w.Active); !ok {
		return nil, fmt.Errorf("active target %q is not there", w.Active)
	}
	return &w, nil
}
