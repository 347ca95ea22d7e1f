// The README's first program with River: Kafka to PostgreSQL, one row per event.
//
// River has no Kafka input. The loop in main is the consumer; the worker is the effect.
package main

import (
	"context"
	"log"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivertype"
	"github.com/twmb/franz-go/pkg/kgo"
)

type Paid struct {
	ID string `json:"id" river:"unique"`
}

func (Paid) Kind() string { return "paid" }

// A redelivered record inserts nothing while its job is in the table: 24 hours after it was
// completed, unless CompletedJobRetentionPeriod says otherwise.
func (Paid) InsertOpts() river.InsertOpts {
	return river.InsertOpts{UniqueOpts: river.UniqueOpts{ByArgs: true, ByState: rivertype.JobStates()}}
}

type PaidWorker struct {
	river.WorkerDefaults[Paid]
	pool *pgxpool.Pool
}

func (w *PaidWorker) Work(ctx context.Context, job *river.Job[Paid]) error {
	tx, err := w.pool.Begin(ctx)
	if err != nil {
		return err
	}
	defer tx.Rollback(ctx)
	if _, err := tx.Exec(ctx, "insert into paid (id) values ($1)", job.Args.ID); err != nil {
		return err
	}
	if _, err := river.JobCompleteTx[*riverpgxv5.Driver](ctx, tx, job); err != nil {
		return err
	}
	return tx.Commit(ctx)
}

func header(record *kgo.Record, name string) string {
	for _, header := range record.Headers {
		if header.Key == name {
			return string(header.Value)
		}
	}
	return ""
}

func main() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres://localhost/app")
	if err != nil {
		log.Fatal(err)
	}
	workers := river.NewWorkers()
	river.AddWorker(workers, &PaidWorker{pool: pool})
	jobs, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
		Queues:  map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: 10}},
		Workers: workers,
	})
	if err != nil {
		log.Fatal(err)
	}
	if err := jobs.Start(ctx); err != nil {
		log.Fatal(err)
	}
	consumer, err := kgo.NewClient(
		kgo.SeedBrokers("localhost:9092"),
		kgo.ConsumerGroup("billing"),
		kgo.ConsumeTopics("orders"),
		kgo.ConsumeStartOffset(kgo.NewOffset().AtStart()),
		kgo.DisableAutoCommit(),
		kgo.BlockRebalanceOnPoll(),
	)
	if err != nil {
		log.Fatal(err)
	}
	for {
		fetches := consumer.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			log.Fatal(err)
		}
		seen := map[string]bool{} // InsertMany refuses a batch that has a unique job twice
		var batch []river.InsertManyParams
		fetches.EachRecord(func(record *kgo.Record) {
			id := header(record, "eventId")
			if id == "" {
				log.Fatal("a record has no id; every restart will end here")
			}
			if !seen[id] {
				seen[id] = true
				batch = append(batch, river.InsertManyParams{Args: Paid{ID: id}})
			}
		})
		if len(batch) > 0 {
			if _, err := jobs.InsertMany(ctx, batch); err != nil {
				log.Fatal(err)
			}
		}
		if err := consumer.CommitUncommittedOffsets(ctx); err != nil {
			log.Fatal(err)
		}
		consumer.AllowRebalance()
	}
}
